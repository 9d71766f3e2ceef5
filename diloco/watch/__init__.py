"""`diloco watch`: a page of a whole run, from the records in its folder."""
