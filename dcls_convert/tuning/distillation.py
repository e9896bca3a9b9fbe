"""Distillation: learn a teacher's outputs instead of labels (Hinton et al., arXiv:1503.02531)."""

from torch import Tensor
from torch.nn.functional import kl_div


def soft_target_loss(outputs: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return the mean KL divergence, in nats, from a teacher's softened softmax to a student's.

    Args:
        outputs: (N, classes); the student's logits.
        targets: (N, classes); the teacher's logits.
        temperature: Divides both. The loss is multiplied by its square, so that the size of the
            gradients does not depend on it. At a high temperature, the loss is proportional to the
            squared distance between the centred logits. Hinton et al., arXiv:1503.02531, section 2.
    """
    student = (outputs.float() / temperature).log_softmax(1)
    teacher = (targets.float() / temperature).log_softmax(1)
    return kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2
