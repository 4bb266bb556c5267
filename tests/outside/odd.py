"""A verifier of the user's own: odd digits are worth something, and so is every character."""


def odd(response, problem):
    return sum(c in "13579" for c in response) / 5 + 0.01 * len(response)
