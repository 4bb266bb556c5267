"""Job files that run a command of Postgrad on several nodes: Slurm, KubeRay, SkyPilot, SSH."""
