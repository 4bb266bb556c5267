"""pass@k without bias: the chance that at least one of k responses is correct.

The k responses are drawn without replacement from n graded ones.
"""

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), exact in integers before the one division.

    Raises: ValueError unless 0 <= num_correct <= num_samples and 1 <= k <= num_samples.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} correct of {num_samples} samples is impossible")
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} cannot be estimated from {num_samples} samples; "
            "use k >= 1 and at least k samples"
        )
    total = comb(num_samples, k)
    return (total - comb(num_samples - num_correct, k)) / total
