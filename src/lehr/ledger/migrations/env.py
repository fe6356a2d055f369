"""How alembic runs the migrations: on the connection that it is handed, in the transaction around it."""

from alembic import context

from lehr.ledger.schema import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True
)
context.run_migrations()
