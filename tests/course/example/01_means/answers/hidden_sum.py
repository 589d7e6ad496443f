from labkit.answers import Edit

WRONG = [
    Edit("    handle.wait()\n", "", told="never waits for its all_reduce"),
    Edit("    y = x @ x.mT\n    handle.wait()\n", "    handle.wait()\n    y = x @ x.mT\n", told="multiply-adds"),
    Edit("grad = grad.clone()", "grad = grad / dist.get_world_size(group)", mistake="This is the mean, not the sum."),
    Edit("x @ x.mT", "x.mT @ x", mistake="y is x x^T: a row and a column for each row of x."),
]
RIGHT = [
    Edit("x @ x.mT", "torch.einsum('ik,jk->ij', x, x)"),
    Edit("grad = grad.clone()", "grad = 1 * grad"),
    Edit("{\"grad\": grad, \"y\": y}", "dict(grad=grad, y=y)"),
]
