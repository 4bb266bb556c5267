"""Recipes: one YAML file each, a method with its vetted settings."""
