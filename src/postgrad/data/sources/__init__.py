"""Sources of problems that are no files: arithmetic, scenes, seeds, reasoning_gym and hub."""
