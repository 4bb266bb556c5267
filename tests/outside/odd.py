"""A verifier of the user: the reward counts odd digits, plus 0.01 per character."""


def odd(response, problem):
    num_odd_digits = sum(character in "13579" for character in response)
    return num_odd_digits / 5 + 0.01 * len(response)
