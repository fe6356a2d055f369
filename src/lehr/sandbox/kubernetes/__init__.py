"""Boxes that are pods of a Kubernetes cluster.

``pod`` is what the cluster is asked to make, ``status`` what it says about one, ``attached`` a pod's streams
over a websocket, ``access`` how the cluster is reached, ``cluster`` the calls, ``backend`` puts them together.
"""
