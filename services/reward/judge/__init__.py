"""The reward `judge`: a language model behind an OpenAI-compatible endpoint grades completions.

`judge_reward` is the reward; `prompts` writes what a judge reads, `verdicts` reads what it answers, `votes` joins them;
`endpoint` calls it at the `pace` allowed, and `answer_cache` keeps what was paid for. Nothing here decides what happens
to a sample that could not be judged: that is the pool's.
"""
