"""Distillation: how far a student's token distributions are from a teacher's.

With p the student's and q the teacher's distribution before a token, and m = (1 - b)·p + b·q:

    sampled   log p(y) - log q(y)   of the sampled token y; its mean over samples is the reverse KL
    forward   Σ q · (log q - log p)   covers everything that the teacher may say
    reverse   Σ p · (log p - log q)   prefers what the teacher says most
    jsd       b · Σ q · (log q - log m) + (1 - b) · Σ p · (log p - log m)   between the two

The sums are over the teacher's top tokens and one more outcome: any other token.
"""

import torch
from torch import Tensor

DIVERGENCES = ("sampled", "forward", "reverse", "jsd")
MIN_TEACHER_LOGPROB = -100.0
MAX_TOP_MASS = -1e-6  # log of the largest probability of the top tokens together


def teacher_advantages(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(tokens,) log q(y) - log p(y): the reverse KL of each sampled token, negated.

    A policy gradient with these advantages descends the reverse KL of the next token. No gradient
    flows through them. Masked tokens have 0.
    """
    gap = teacher_logprobs.detach() - logprobs.detach()
    return torch.where(mask, gap, torch.zeros_like(gap))


def with_rest(logprobs: Tensor) -> Tensor:
    """(tokens, k + 1) the log-probs of k tokens, and the log-prob of all other tokens together."""
    top = logprobs.logsumexp(-1, keepdim=True).clamp(max=MAX_TOP_MASS)
    rest = torch.log(-torch.expm1(top))
    return torch.cat([logprobs, rest], -1)


def divergence(
    student: Tensor, teacher: Tensor, kind: str = "reverse", jsd_beta: float = 0.5
) -> Tensor:
    """(tokens,) the divergence named by `kind`: forward, reverse or jsd.

    Args:
        student: (tokens, outcomes) log-probs, from with_rest.
        teacher: (tokens, outcomes) those of the teacher; no gradient reaches it.
        kind: forward, reverse or jsd.
        jsd_beta: b of jsd, between 0 and 1.
    """
    # A teacher may exclude a token: 0 · -inf must be 0, and no divergence may be infinite.
    teacher = teacher.detach().clamp(min=MIN_TEACHER_LOGPROB)
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    shares = torch.tensor([1 - jsd_beta, jsd_beta], dtype=student.dtype, device=student.device)
    log_p, log_q = student + shares[0].log(), teacher + shares[1].log()
    mixture = torch.logaddexp(log_p, log_q)
    return jsd_beta * _kl(teacher, mixture) + (1 - jsd_beta) * _kl(student, mixture)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    """(tokens,) Σ left · (log left - log right) over the outcomes."""
    return (left.exp() * (left - right)).sum(-1)
