"""What the held-out figures of a run mean, in the order in which they are shown."""

from __future__ import annotations

FIGURES = {
    "accuracy": "answers right",
    "truth": "true reward",
    "truth_se": "standard error of the true reward",
    "reward": "reward",
    "pass_at_k": "prompts with an answer that is right",
    "accuracy/sums/sampled": "answers right, sampled at temperature 1",
    "accuracy/sums/greedy": "answers right, greedy",
    "accuracy/sums-hard/sampled": "long chains right, sampled",
    "accuracy/sums-hard/greedy": "long chains right, greedy",
    "pair_accuracy": "pairs ordered as the truth orders them",
    "step_auc": "right steps scored above wrong ones (AUC)",
    "first_wrong_f1": "first wrong step found (F1)",
    "sums-hard/pair_accuracy": "pairs of long chains ordered as the truth orders them",
    "sums-hard/step_auc": "steps of long chains (AUC)",
    "sums-hard/first_wrong_f1": "first wrong step of long chains (F1)",
    "lead": "mean lead of the better response",
    "score_mean": "mean score",
    "score_std": "spread of scores",
    "heldout_loss": "loss on held-out items",
}
