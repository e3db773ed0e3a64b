"""The methods, one folder each, and the registry that names them."""
