"""The commands `doctor` and `draft train`, with the modules that only they need."""
