"""What runs as process 1 of a box, under the system's own python3, with the standard library alone.

The host compiles these modules once and sends them over the control socket; nothing of lehr is visible as a
file inside. The runner finishes the set-up that needs rights in the box's own namespaces, gives every right
up, installs the system call filter on itself and then serves requests. Programs are its children. They do not
hold the control socket, cannot trace it (filter, not dumpable) and cannot signal it (it is process 1 of their
namespace).
"""
