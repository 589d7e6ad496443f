import pytest
from tests.twin import Case
TP, SP, PP, CP, EP = "tensor_model_parallel_size", "sequence_parallel","pipeline_model_parallel_size","context_parallel_size","expert_model_parallel_size"
@pytest.mark.parametrize("sharding", ["optim","optim_grads"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout,model,dp", [({},{},2),({},{},4),({TP:2,SP:True},{"family":"qwen3","add_bias_linear":True},2),({PP:2},{"num_layers":4,"untie_embeddings_and_output_weights":False},2),({PP:2,"num_virtual_stages_per_pipeline_rank":2},{"num_layers":4},2),({PP:2,"pipeline_schedule":"zb_h1"},{"num_layers":4,"untie_embeddings_and_output_weights":False},2),({CP:2},{},2),({EP:2},{"family":"mixtral"},4)],ids=str)
def test_zero(assert_same_as_serial, sharding, overlap, layout, model, dp):
    assert_same_as_serial(Case(layout, model, accumulation=4, double=True, sharding=sharding, overlap=overlap, bucket_size=700 if overlap else None), dp)
