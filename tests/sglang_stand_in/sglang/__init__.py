"""A stand-in for SGLang: its calls with its signatures, over a transformers model in this process.

What SGLang's schedulers do is simplified to one task that advances requests in turn. Kept is what an engine of
ours depends on, read from the sources of the version that `tests/data/sglang_signatures.json` records:

- messages reach the scheduler in order; pausing and aborting are not answered
- ids are aborted by their beginning; a queued request is aborted with the tokens that were reported, a running one
  with its next token; an abort of a request that has not reached the scheduler is lost
- keys and values outlive a weight update, unless requests are retracted and the cache is flushed
- weights are taken within a session only, by names of the checkpoint; those asleep without a backup are lost
- log-probabilities are those at the temperature, over the whole vocabulary
"""
