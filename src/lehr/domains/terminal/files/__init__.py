"""Small file jobs in a shell; the final state of the files decides."""
