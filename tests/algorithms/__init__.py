"""Tests of postgrad.algorithms: vector_* files hold checks with worked-out numbers, test_mutations shows that they can fail."""
