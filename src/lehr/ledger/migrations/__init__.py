"""One linear history of the schema, applied when a run is opened."""
