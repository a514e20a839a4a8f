"""Every metric of a training run, by its name in the event log: its unit and description.

`docs/metrics.py` generates docs/reference/metrics.md from this table, and the tests compare it with the metrics of
every run. A part of a name in capitals stands for a user's name: a teacher, an attribute. The server's metrics are
described where they are defined (`serve/metrics.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    unit: str
    meaning: str


SHARE, COUNT, TOKENS, SECONDS, BYTES, NATS = "share", "count", "tokens", "s", "bytes", "nats"
REWARD, LOSS, NORM, RATIO, STEPS = "reward", "loss", "norm", "ratio", "versions"

# Metrics of an RL step.
RL: dict[str, Metric] = {
    "reward/mean": Metric(
        REWARD, "mean reward of the step's samples with their turns; with dynamic sampling of all samples drawn"
    ),
    "reward/std": Metric(REWARD, "their standard deviation"),
    "reward/min": Metric(REWARD, "the lowest"),
    "reward/max": Metric(REWARD, "the highest"),
    "reward/rule": Metric(REWARD, "mean of what [reward] gave, without an environment's turns; only with them"),
    "reward/errors": Metric(SHARE, "of samples that could not be scored"),
    "reward/zero_std_groups": Metric(SHARE, "of groups whose rewards are all equal, which give no gradient"),
    "reward/length_correlation": Metric("-1 to 1", "of length and reward within a group, the mean over groups"),
    "shaped_reward/mean": Metric(REWARD, "mean reward after [algorithm.shaping]"),
    "accuracy": Metric(SHARE, "of samples that are right, where the truth is known"),
    "pass_at_k": Metric(SHARE, "of prompts with a right answer among their samples"),
    "response/repetition": Metric(SHARE, "of a response's 4-grams that are repeated"),
    "response/common": Metric(SHARE, "of the step's prompts that have the most common response"),
    "length/mean": Metric(TOKENS, "mean length of the responses, tokens of the policy alone"),
    "length/min": Metric(TOKENS, "the shortest"),
    "length/max": Metric(TOKENS, "the longest"),
    "length/prompt_mean": Metric(TOKENS, "mean length of the prompts"),
    "length/stopped_mean": Metric(TOKENS, "mean length of the responses that were not truncated"),
    "length/truncated": Metric(SHARE, "of responses truncated at sampling.max_tokens, or at the end of the context"),
    "length/aborted": Metric(SHARE, "of responses that were aborted"),
    "turns/mean": Metric(COUNT, "turns of an episode with an environment"),
    "turns/reward": Metric(REWARD, "rewards of single turns from the environment, per episode"),
    "turns/out_of_turns": Metric(SHARE, "of episodes that ended at environment.max_turns"),
    "tree/generated_tokens": Metric(TOKENS, "sampled for the step's trees of responses, shared tokens counted once"),
    "tree/discarded": Metric(SHARE, "of these, in no response: pruned branches of a search, and repeated steps"),
    "tree/prm_tokens": Metric(TOKENS, "that the process model of [search] computed, where it runs in this process"),
    "tree/shared": Metric(SHARE, "of the responses' tokens that were sampled once and are shared by several"),
    "tree/early": Metric(SHARE, "of responses used in place of others, because they ended before the last branching"),
    "dynamic/drawn": Metric(COUNT, "groups that dynamic sampling has drawn for the step"),
    "dynamic/filtered": Metric(SHARE, "of these, dropped because their rewards are all equal"),
    "dynamic/kept_reward": Metric(REWARD, "mean reward of the groups that were kept"),
    "dropped/samples": Metric(COUNT, "samples not used for training: no reward, or no group left"),
    "dropped/length_mean": Metric(TOKENS, "their mean length"),
    "dropped/updates": Metric(SHARE, "of the step's updates, skipped because of a non-finite loss or gradient"),
    "pairs/count": Metric(COUNT, "pairs of a better and a worse response used in the step"),
    "policy/loss": Metric(LOSS, "the policy's loss; 0 by construction with one update per batch"),
    "policy/grad_norm": Metric(NORM, "norm of the gradient before clipping"),
    "policy/lr": Metric("rate", "learning rate"),
    "policy/updates": Metric(COUNT, "updates made of the batch"),
    "policy/entropy": Metric(NATS, "mean entropy of the policy per token"),
    "policy/ratio_mean": Metric(RATIO, "mean of new to old probability of a token"),
    "policy/ratio_min": Metric(RATIO, "the smallest"),
    "policy/ratio_max": Metric(RATIO, "the largest"),
    "policy/kl_old": Metric(
        NATS, "mean of old less new log-prob: how far the updates of this batch have changed the policy"
    ),
    "policy/clip_low": Metric(SHARE, "of tokens clipped at the lower bound of the ratio"),
    "policy/clip_high": Metric(SHARE, "of tokens clipped at the upper bound"),
    "policy/clip_dual": Metric(SHARE, "of tokens clipped by dual clip"),
    "advantage/mean": Metric("advantage", "mean over tokens"),
    "advantage/min": Metric("advantage", "the least"),
    "advantage/max": Metric("advantage", "the greatest"),
    "advantage/zero": Metric(SHARE, "tokens without a gradient, for example of discarded branches"),
    "return/mean": Metric(REWARD, "mean return of a token, the critic's target"),
    "return/min": Metric(REWARD, "the least"),
    "return/max": Metric(REWARD, "the greatest"),
    "value/mean": Metric(REWARD, "mean value that the critic predicts"),
    "value/loss": Metric(LOSS, "the critic's loss"),
    "value/clip": Metric(SHARE, "of tokens whose value was clipped"),
    "value/grad_norm": Metric(NORM, "norm of the critic's gradient before clipping"),
    "value/explained_variance": Metric(
        "up to 1", "share of the returns' variance that the critic explains; 0: no help"
    ),
    "kl/coef": Metric("factor", "weight of the KL to the reference, which kl.target adapts"),
    "kl/reference": Metric(NATS, "KL to the reference per token, by the sampled tokens"),
    "kl/reference_per_response": Metric(NATS, "the same per response"),
    "kl/loss": Metric(NATS, 'the KL as it is in the loss (kl.where = "loss")'),
    "teacher/NAME/kl": Metric(NATS, "policy's less teacher's log-prob of the sampled tokens, per token"),
    "teacher/kl_top_k": Metric(NATS, "KL over the tokens that the teachers find likeliest, per token"),
    "mismatch/abs_mean": Metric(NATS, "mean difference of the trainer's and the engine's log-prob of a token"),
    "mismatch/abs_max": Metric(NATS, "the greatest"),
    "mismatch/abs_std": Metric(NATS, "its standard deviation"),
    "mismatch/k1": Metric(NATS, "KL of the engine from the trainer, by its plain estimate"),
    "mismatch/k3": Metric(NATS, "the same by the estimate that is never negative"),
    "mismatch/ess": Metric(SHARE, "effective sample size of the tokens' importance weights"),
    "mismatch/correlation": Metric("-1 to 1", "of the two probabilities of a token"),
    "mismatch/routing": Metric(
        SHARE,
        "with train.routing_replay: of (token, router) pairs, prompts included, in which "
        "the trainer's own router would have chosen other experts than the engine's",
    ),
    "mismatch/weight_mean": Metric(RATIO, "mean importance weight that corrects for the engine"),
    "mismatch/weight_max": Metric(RATIO, "the greatest"),
    "mismatch/masked": Metric(SHARE, "of tokens masked by the correction"),
    "rollout/truncated_mass": Metric(
        SHARE, "of probability removed by top_p and top_k, which the loss takes into account"
    ),
    "rollout/dropped": Metric(COUNT, 'samples dropped because they were too old, in total (placement.stale = "drop")'),
    "rollout/staleness_bound": Metric(STEPS, "the current limit of staleness (placement.staleness)"),
    "rollout/restarts": Metric(COUNT, "rollout processes restarted, in total"),
    "staleness/mean": Metric(STEPS, "between the learner and the oldest token of a sample"),
    "staleness/max": Metric(STEPS, "of the oldest sample"),
    "publish/seconds": Metric(SECONDS, "to transfer the weights to the engines"),
    "publish/bytes": Metric(BYTES, "sent for it"),
    "publish/extra_bytes": Metric(BYTES, "of memory used besides the weights"),
    "publish/share": Metric(SHARE, "of the weights that had changed (placement.delta)"),
    "publish/gather_seconds": Metric(SECONDS, "to gather sharded weights"),
    "publish/gather_bytes": Metric(BYTES, "of the gathered weights"),
    "probe/abs_mean": Metric(NATS, "mean difference of the log-probs of another engine from the trainer's"),
    "probe/abs_max": Metric(NATS, "the greatest"),
    "probe/follows": Metric(SHARE, "of the trainer's last change that the engine reflects; 1: it has the new weights"),
    "perf/samples_per_second": Metric("1/s", "samples of the step by its seconds"),
    "perf/tokens_per_second": Metric("1/s", "response tokens of the step by its seconds"),
    "perf/peak_bytes": Metric(BYTES, "maximum memory so far, as counted by the ledger"),
    "progress/samples": Metric(COUNT, "samples so far"),
    "progress/tokens": Metric(TOKENS, "response tokens so far"),
    "progress/prompts": Metric(COUNT, "training prompts drawn so far"),
}

# Durations of a step's phases.
TIMES: dict[str, Metric] = {
    "time/step": Metric(SECONDS, "the whole step"),
    "time/prompts": Metric(SECONDS, "reading prompts"),
    "time/generate": Metric(SECONDS, "generating responses, without tools"),
    "time/tools": Metric(SECONDS, "waiting for environments and agents"),
    "time/reward": Metric(SECONDS, "scoring"),
    "time/wait": Metric(SECONDS, "the learner waiting for samples (async)"),
    "time/old": Metric(SECONDS, "the trainer's own log-probs before the update"),
    "time/reference": Metric(SECONDS, "log-probs of the reference"),
    "time/teachers": Metric(SECONDS, "log-probs of the teachers"),
    "time/values": Metric(SECONDS, "values of the critic"),
    "time/advantages": Metric(SECONDS, "advantages and returns"),
    "time/update": Metric(SECONDS, "gradients and updates of the policy"),
    "time/critic": Metric(SECONDS, "gradients and updates of the critic"),
    "time/publish": Metric(SECONDS, "transferring the weights to the engine"),
    "time/swap": Metric(SECONDS, "moving tensors between device and host (part of other phases)"),
    "time/mode_switch": Metric(SECONDS, "changing between training and generation in one process"),
    "time/evaluate": Metric(SECONDS, "held-out evaluation since the step before"),
    "time/checkpoint": Metric(SECONDS, "saving the state since the step before"),
    "time/dump": Metric(SECONDS, "writing samples to rollouts/ (train.dump)"),
}

# Metrics of a step of supervised training: SFT, reward and process models, preferences.
SUPERVISED: dict[str, Metric] = {
    "loss": Metric(LOSS, "mean loss of the batch"),
    "grad_norm": Metric(NORM, "norm of the gradient before clipping"),
    "lr": Metric("rate", "learning rate"),
    "tokens": Metric(TOKENS, "of the batch"),
    "pair_accuracy": Metric(SHARE, "of pairs whose better response is ahead, a tie as half (preferences)"),
    "lead": Metric(REWARD, "mean lead of the better response (preferences)"),
    "label_auc": Metric(SHARE, "chance that a desirable response is ahead of an undesirable one (KTO)"),
    "drift": Metric(NATS, "distance from the reference that the loss compares with (KTO)"),
}

# Held-out figures, of RL and of supervised training. Step 0 is before training.
HELD_OUT: dict[str, Metric] = {
    "heldout/reward": Metric(REWARD, "mean reward of held-out prompts, those of turns included (RL)"),
    "heldout/reward/rule": Metric(REWARD, "what [reward] gave of it, with an environment"),
    "heldout/turns/reward": Metric(REWARD, "what the environment gave of it"),
    "heldout/accuracy": Metric(SHARE, "of answers that are right, where the truth is known (RL)"),
    "heldout/truth": Metric(REWARD, "mean of the [truth] reward (RL)"),
    "heldout/truth_se": Metric(REWARD, "its standard error"),
    "heldout/length": Metric(TOKENS, "mean length of the responses (RL)"),
    "heldout/heldout_loss": Metric(LOSS, "mean loss on held-out items"),
    "heldout/pair_accuracy": Metric(SHARE, "of pairs ordered as the truth orders them, a tie as half"),
    "heldout/lead": Metric(REWARD, "mean lead of the better response"),
    "heldout/label_auc": Metric(SHARE, "chance that a desirable response is ahead of an undesirable one (KTO)"),
    "heldout/drift": Metric(NATS, "distance from the reference (KTO)"),
    "heldout/score_mean": Metric(REWARD, "mean score of a reward model"),
    "heldout/score_std": Metric(REWARD, "their standard deviation"),
    "heldout/ATTRIBUTE/mse": Metric("score²", "mean squared error of an attribute (regression)"),
    "heldout/ATTRIBUTE/correlation": Metric("-1 to 1", "of given and predicted ratings (regression)"),
    "heldout/step_auc": Metric(SHARE, "chance that a right step scores above a wrong one (process models)"),
    "heldout/first_wrong_f1": Metric(SHARE, "F1 of finding the first wrong step, as ProcessBench counts it"),
    "heldout/near_misses": Metric(SHARE, "of wrong solutions near the truth that the model does not detect (worlds)"),
    "heldout/sums-hard/pair_accuracy": Metric(SHARE, "of pairs of long chains ordered as the truth orders them"),
    "heldout/sums-hard/step_auc": Metric(SHARE, "step_auc on long chains"),
    "heldout/sums-hard/first_wrong_f1": Metric(SHARE, "first_wrong_f1 on long chains"),
    "heldout/accuracy/WORLD/sampled": Metric(
        SHARE, "of answers that are right, sampled at temperature 1 (SFT, preferences)"
    ),
    "heldout/accuracy/WORLD/greedy": Metric(SHARE, "the same, greedy"),
}

SECTIONS = {"A step of RL": RL, "Seconds of a step of RL": TIMES, "A step of supervised training": SUPERVISED,
            "Held-out figures": HELD_OUT}  # fmt: skip


def undescribed(names: Iterable[str]) -> list[str]:
    """The names without a description in this table."""
    return sorted(name for name in names if not _described(name))


@cache
def _described(name: str) -> bool:
    parts = name.split("/")
    return any(_fits(entry.split("/"), parts) for section in SECTIONS.values() for entry in section)


def _fits(entry: list[str], parts: list[str]) -> bool:
    return len(entry) == len(parts) and all(a == b or a.isupper() for a, b in zip(entry, parts, strict=True))
