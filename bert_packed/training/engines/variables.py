"""What a checkpoint calls the variables of a model and of its optimizer, under every engine."""


def named_weights(model):
    """A model's weights by path below the model: dict of Keras variables.

    States that go from pack to pack are none: they are of a run, not of a model.
    """
    return {weight.path.removeprefix(model.name + "/"): weight for weight in model.trainable_weights}


def named_training_state(model, optimizer):
    """What a resumed run needs besides weights, by path: optimizer, dropout seeds, states between packs."""
    weights = {id(weight) for weight in model.weights}
    seeds = [variable for variable in model.variables if id(variable) not in weights]
    # By order: Keras numbers seed generators by how many the process has made, in other models too
    state = {f"dropout_seed/{number}": seed for number, seed in enumerate(seeds)}
    carried = {v.path.removeprefix(model.name + "/"): v for v in model.non_trainable_weights}
    return {**state, **carried, **{variable.path: variable for variable in optimizer.variables}}
