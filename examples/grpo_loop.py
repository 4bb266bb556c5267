"""GRPO as a loop of primitives. It computes the same weights as the recipe grpo."""

import postgrad
from postgrad.algorithms.advantages import grpo


def train_grpo(model, rows, reward, steps, batch_size, group_size, lr, **settings):
    """Train a model on rows in their order and return the session."""
    session = postgrad.Session(model, **settings)
    problems = session.problems(rows)
    for step in range(1, steps + 1):
        first = (step - 1) * batch_size
        chosen = [problems[i % len(problems)] for i in range(first, first + batch_size)]
        batch = session.sample(chosen, n=group_size, step=step)
        rewards = session.score(batch, reward)
        advantages = grpo(rewards, batch.rows["group"])
        batch.tokens["advantages"] = batch.expand(advantages) * batch.tokens["loss_mask"]
        session.forward_backward(batch, loss="ppo_clip")
        session.optim_step(lr=lr)
        print(f"step {step}: reward {float(rewards.mean()):.3f}")
    return session


if __name__ == "__main__":
    sums = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(5) for b in range(5)]
    train_grpo("tiny", sums, "exact", 20, batch_size=8, group_size=8, lr=1e-3, max_tokens=4)
