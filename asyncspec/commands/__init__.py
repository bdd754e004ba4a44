"""Commands other than `train` and `bench`: one file each."""
