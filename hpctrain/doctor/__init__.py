"""What is wrong with this machine, or with which node of a job, and the cure.

Gathering facts (`facts`, and the programs `probe` and `torch_facts` that run in processes of their
own) is apart from judging them, which is pure. `examination.CHECKS` lists all checks; `nodes`
compares the nodes of a running job.

Nothing is imported here: the programs above should start fast.
"""
