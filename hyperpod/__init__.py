"""Manifests for Amazon SageMaker HyperPod; see README.md beside this file."""
