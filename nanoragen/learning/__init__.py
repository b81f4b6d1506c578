"""Learning: what each sampled token is credited with, and how much of the gradient is signal.

In: episodes, rewards and group ids. Out: an advantage for every sampled token, for the loss in train.py.

Read in this order:
    advantages.py   baselines, scales, credit by turn, the SNR filter's scores, GAE
    critic.py       the value model of --algo ppo
    gradients.py    norms of the task, entropy and KL gradients by in-group reward variance
"""
