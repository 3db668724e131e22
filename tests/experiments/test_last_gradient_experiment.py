"""The experiment on delayed gradients in the bilevel search, on a tiny setting."""

from experiments import last_gradient
from tests.experiments.printed_tables import printed_rows


def test_the_delay_is_chosen_if_its_loss_is_within_the_bound(capsys):
    last_gradient.main(["--steps", "4", "--settings", "1"])
    [(optimizer, rate, _, increase, chosen, seconds)] = printed_rows(capsys.readouterr().out)
    assert (optimizer, rate) == ("sgd", "0.1")
    is_late = float(increase) <= last_gradient.ALLOWED_INCREASE
    assert chosen == ("exact of the last gradient" if is_late else "exact")
    exact_us = 1e6 * (10e-6 + 4 * (32 * 32 + 128 * 32 + 4 * 2 * 32 * 64 + 32 * 32) / 12.5e9)
    assert float(seconds) == round(exact_us - 10.0 * is_late, 1)
