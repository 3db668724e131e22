"""How the validation loss reaches the relaxed choice: the estimators, one file each.

`diffshard.bilevel(estimator=NAME)` takes the file's name. How to choose:

- `curvature`, the default: derivatives of the exact model predict the effect of small errors to second order. Take it
  where the loss is a cross-entropy and the strategies are nearly exact.
- `mixture` (DARTS): every strategy runs and the results are mixed by their weights. Mixing averages errors away, so
  that it predicts smaller increases than there are. With `order=2` it sees what the choice does to training as well.
- `sampled`: one strategy of each node is drawn and runs. It sees the whole increase, with more noise.

A new estimator is a new file with a function that returns a `diffshard.bilevel_search.base.Estimator`, and this
function as its `EXAMPLE`, which must need no arguments; the conformance tests find it there. Options are arguments of
the function, as in `diffshard.bilevel(estimator=diffshard.formats.sampled(temperature=0.5))`. A user's own function
`increase(space, params, batch, relaxed_choice, key, progress)` can be handed in without a file; training then runs the
exact choice.
"""
