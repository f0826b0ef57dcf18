"""Jobs that run already: the record of each, and the commands about them."""
