"""The loss between two networks' outputs."""

import torch

from dcls_convert.tuning.distillation import soft_target_loss


def test_the_loss_is_the_divergence_and_at_high_temperature_the_distance_of_centred_logits():
    ours, theirs = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    log_ours = ours.log_softmax(1)
    log_theirs = theirs.log_softmax(1)
    divergence = (log_theirs.exp() * (log_theirs - log_ours)).sum(1).mean()
    torch.testing.assert_close(soft_target_loss(ours, theirs, 1.0), divergence)
    difference = ours - theirs
    centred = difference - difference.mean(1, keepdim=True)
    distance = centred.square().mean(1).mean() / 2
    # The remaining terms of the series are about 1 / 100 of the first.
    torch.testing.assert_close(soft_target_loss(ours, theirs, 100.0), distance, rtol=0.02, atol=0)
