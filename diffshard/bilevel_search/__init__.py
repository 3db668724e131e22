"""A bilevel search trains a model's parameters and, at the same time, chooses strategies that change its loss.

Two levels, hence the name: the parameters θ take steps on the training loss; logits A, whose softmax is the relaxed
choice, take steps on the validation loss and on the cost of a step. `search_spaces.communication` shows the smallest
example: one `psum` that can send its values exactly or in 8 bits.

Training runs the strategies of largest weight, so that the slopes of the loss are measured where they were chosen: the
two levels alternate. How the validation loss reaches A is the estimator (`curvature`, or a user's function); how it is
weighed against the cost is the objective:

- `max_loss_increase`: the least cost at no more than this increase, with a multiplier that finds its own size.
- `cost_weight`: a fixed trade, when it is known what a percent of step time is worth in loss.

The choice that comes out is a proposal: `BilevelSearch.validate` trains it from the start beside simpler ones.

Where to find what: `base` has the vocabulary. `search` is the entry; what users give it is checked by `inputs`, and
their space by `spaces`. A step (`step`) trains the model and asks for the increase of its loss (`model` and
`curvature`, with the optimiser's step sizes in `optimizer_derivatives`), and weighs it against the cost (`objective`).
`relaxation` has the relaxed choice, its cost, and the way back to a discrete choice. At the end
`candidates` lists choices that are worth a training, and `validation_runs` trains them. The folder `plans` has the
plan that comes out, and how a model trains with it.
"""
