"""One module a command. ``lehr.app.cli`` imports a module when its command is called, not before."""
