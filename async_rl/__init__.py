"""async-rl: asynchronous off-policy RL for language models on message queues."""
