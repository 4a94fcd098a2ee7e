"""Both sides: schemas, data by version, and readers over them."""
