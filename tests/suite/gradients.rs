//! Second derivatives.

burn_blocksparse_tests::tests!(gradients: gradients_equal_the_backward_pass, hessian_vector_products_equal_differences, gradients_are_differentiated_by_every_input, gradients_on_kernels_are_refused);
