"""Pure functions: what rewards, preferences and teachers make of a policy.

    shaping.py              which rewards are compared, and which samples are trained on
    advantages/groups.py    how good is a sample within its group: grpo, rloo, …; formula, settings and source together
    advantages/returns.py   how good is each token: returns-to-go, a critic's gae
    advantages/turns.py     how good is each turn of an episode
    losses/clipped.py       how far may one update move a token: ppo, gspo, cispo, …
    losses/gradient.py      policy gradients that are not clipped
    losses/covariance.py    which tokens make the entropy collapse
    kl.py                   how far is the policy from the reference, in the loss or in the reward
    correction.py           what if the engine that sampled is not quite the trainer's policy
    aggregation.py          how much does each token weigh
    losses/objective.py     all of these in one number
    preference/, distillation/, reward_model.py, value_loss.py   the same for pairs, teachers, scores and critics
    logprobs.py, blocks.py  log-probabilities without ever holding all logits

A loss of one's own is one file: `losses/__init__.py` begins with one.
"""
