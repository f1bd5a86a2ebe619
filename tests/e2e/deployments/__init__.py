"""Plans and the quick start on the engines that start them: Docker Compose and Slurm."""
