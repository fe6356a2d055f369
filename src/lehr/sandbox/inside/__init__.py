"""What runs inside, under the system's own python3, with the standard library alone.

The host compiles these modules once and sends them over the control socket; nothing of lehr is visible as a
file inside. The zygote is forked into a runner for each box, which enters namespaces of its own, gives every
right up that programs could use, installs the system call filter on itself and then serves requests. Programs
are forks of the runner under another user. They do not hold its socket, cannot trace it (filter, another user,
not dumpable) and cannot signal it (another user, and process 1 of their namespace).
"""
