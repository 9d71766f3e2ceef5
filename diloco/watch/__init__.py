"""`diloco watch`: a page that shows a whole run, from the records in its folder."""
