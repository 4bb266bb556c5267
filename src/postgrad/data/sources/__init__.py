"""Sources of problems that are no files: `arithmetic:`, `seeds:`, `reasoning_gym:` and `hub:`."""
