"""The generated data sets: posed figures, pairs of them, and classes of bodies with four limbs."""
