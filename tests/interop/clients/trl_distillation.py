"""The reverse KL of TRL's distillation trainers on given logits, and its gradient.
In: student and teacher (T, V), temperature, k. Out: the loss of each case and its gradient in the student's logits."""

import json
import sys

import torch
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdft.loss_utils import add_tail_bucket, compute_divergence

arguments = json.load(sys.stdin)
teacher = torch.tensor(arguments["teacher"])


def whole(student):
    """GKD's loss, averaged over tokens."""
    labels = torch.zeros(student.shape[:1], dtype=torch.long)[None]
    return GKDTrainer.generalized_jsd_loss(
        student[None], teacher[None], labels, beta=1.0, temperature=arguments["temperature"]
    )


def top_k(student):
    """SDFT's loss over the teacher's most likely tokens and a bucket of all others."""
    ours, theirs = ((each / arguments["temperature"]).log_softmax(-1) for each in (student, teacher))
    ids = theirs.topk(arguments["k"]).indices
    ours, theirs = (add_tail_bucket(each.gather(-1, ids)) for each in (ours, theirs))
    return compute_divergence(ours, theirs, 1.0).mean()


results = {}
for case in (whole, top_k):
    student = torch.tensor(arguments["student"], requires_grad=True)
    loss = case(student)
    loss.backward()
    results[case.__name__] = {"loss": loss.item(), "gradient": student.grad.tolist()}
print()
print(json.dumps(results))
