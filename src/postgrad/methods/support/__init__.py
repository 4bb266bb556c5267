"""Code that several methods share. Nothing here is a method by itself."""
