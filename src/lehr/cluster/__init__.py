"""Starts roles, as local processes, and watches them. It never carries a message.

A role is an import path, a frozen config and the cores it may use; it is built inside its own process.
"""
