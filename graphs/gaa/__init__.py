"""Attribute-driven graph domain adaptation (GAA): classify an unlabelled graph from a labelled one.

R. Fang, B. Li, Z. Kang, Q. Zeng, N. Hosseini Dashtbayaz, R. Pu, C. Ling, B. Wang, "On the Benefits of
Attribute-Driven Graph Domain Adaptation", ICLR 2025, arXiv:2502.06808.

Beside the given edges, a second channel sees a graph made of the attributes alone (k nearest neighbours).
Both channels are encoded, the similarity between the two embeddings is aligned across the domains, the fused
embeddings are aligned adversarially, and one classifier serves both graphs.
"""
