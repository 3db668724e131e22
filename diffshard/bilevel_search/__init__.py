"""Searching strategies that change numbers: parameters and choice train together, on training and validation data.

Parameters θ take steps on the training loss; logits A of the choice take steps on the validation loss and on the cost.
How the loss reaches A is the estimator; how loss and cost are weighed is the objective:

- estimator `curvature`, the default: expected damage ⟨softmax(A), ½ E[(g·e)²]⟩ of errors e of results, and ¼ Σ η e² of
  errors of gradients in steps of size η, from derivatives of the exact model, as which θ trains. The effect of small
  errors is of second order and this is that order. Take it where the loss is a cross-entropy and the strategies are
  near exact.
- estimator `mixture` (DARTS): every strategy runs, mixed by softmax(A). Mixing averages errors away, so it sees less
  damage than there is. With `order=2` it sees what the choice does to training as well.
- estimator `sampled`: one strategy of each node is drawn and runs. It sees the whole damage, with more noise.
- `max_loss_increase`: the least cost at no more than this loss, with a multiplier that finds its own size.
- `cost_weight`: a fixed trade, when it is known what a percent of step time is worth in loss.

The choice that comes out is a proposal: `prove` trains it from the start beside simpler ones.
"""
