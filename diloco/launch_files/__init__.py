"""`diloco launch-files`: the files with which clusters start the islands of a run."""
