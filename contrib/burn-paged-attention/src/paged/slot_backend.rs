//! Slots one by one on each backend. Autodiff has none: public functions hand over tensors that it does not follow.

#[cfg(any(feature = "flex", feature = "ndarray", feature = "cube"))]
use crate::paged::slot_ops::PageSlotOps;

#[cfg(feature = "flex")]
impl PageSlotOps for burn::backend::Flex {}

#[cfg(feature = "ndarray")]
impl PageSlotOps for burn::backend::NdArray {}

#[cfg(feature = "cube")]
mod kernels {
    use crate::kernels::paged;
    use crate::kernels::paged::SlotShape;
    use burn::tensor::DType;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;

    use super::PageSlotOps;
    use crate::paged::slots_reference as reference;
    use burn_blocksparse::internal::cube::{checked, empty, integers, uses_reference};

    impl PageSlotOps for CubeBackend {
        fn walk_slots(table: CubeTensor, spans: CubeTensor, page: usize) -> CubeTensor {
            let [walks, entries] = table.meta.shape().dims();
            if uses_reference() || walks * entries == 0 {
                return reference::walk_slots::<Self>(table, spans, page);
            }
            let [table, spans] = [table, spans].map(integers);
            let shape = SlotShape::new(walks, entries, page);
            let slots = empty(&table, [walks, shape.slots()], DType::I32);
            checked(paged::walk_slots(
                &table.client,
                &shape,
                [&table.handle, &spans.handle],
                &slots.handle,
            ));
            slots
        }

        fn picked_slots(
            places: CubeTensor,
            table: CubeTensor,
            heads: usize,
            page: usize,
        ) -> CubeTensor {
            let [walks, most] = places.meta.shape().dims();
            let [_, entries] = table.meta.shape().dims();
            if uses_reference() || walks * entries * most == 0 {
                return reference::picked_slots::<Self>(places, table, heads, page);
            }
            let [places, table] = [places, table].map(integers);
            let shape = SlotShape::new(walks, entries, page);
            let slots = empty(&table, [walks, heads, most], DType::I32);
            checked(paged::picked_slots(
                &table.client,
                &shape,
                [heads, most],
                [&places.handle, &table.handle],
                &slots.handle,
            ));
            slots
        }
    }
}
