"""Learning: what each sampled token is credited with. The loss and its update stand in train.py.

In: episodes, rewards and group ids. Out: an advantage for every sampled token, for the loss in train.py.

Read in this order:
    advantages.py   baselines, scales, credit by turn, the SNR filter's scores, GAE
    critic.py       the value model of --algo ppo
    updates.py      what an update of the policy and one of the critic have in common
"""
