//! Attention over the selections of single queries.

use burn_blocksparse::internal::gather_rows;
use burn_sparse_select::{
    Always, Budget, EstimateInputs, GqaReduction, SelectedOptions, Selection, attention_selected,
};

use burn_blocksparse_tests::prelude::*;

burn_blocksparse_tests::tests!(selected);

fn moba() -> Selection {
    "moba:16,3".parse().unwrap()
}

/// Texts, and the numbers of first and last layers with full attention.
const TEXTS: &str = "
    moba:512,3                    | 0 | 0
    moba:4096,12,3                | 0 | 3
    moba:8,1                      | 0 | 0
    moba:128,2,share=mean         | 0 | 0
    moba:64,4,1,share=max         | 0 | 1
    moba:64,8,first=1,local=2     | 0 | 0
    moba:64,8,2,first=4,share=max | 0 | 2
    quest:16,2048                 | 0 | 0
    quest:32,96,2                 | 2 | 0
    quest:16,48,share=no          | 0 | 0
    quest:16,64,1,first=1,local=2 | 1 | 0
";

#[test]
fn texts() {
    for [text, first, last] in rows(TEXTS) {
        let selection: Selection = text.parse().unwrap();
        assert_eq!(selection.to_string(), text);
        let estimator = selection.estimator();
        let layers = [estimator.full_first_layers(), estimator.full_last_layers()];
        assert_eq!(layers, [first, last].map(one::<usize>));
        let json = serde_json::to_string(&selection).unwrap();
        assert_eq!(serde_json::from_str::<Selection>(&json).unwrap(), selection);
    }
    for notation in [
        "moba:BLOCK,K[,FULL_LAST_LAYERS]",
        "quest:PAGE,BUDGET[,FULL_FIRST_LAYERS]",
    ] {
        assert!(Selection::NOTATION.contains(&notation));
    }
}

#[test]
fn rules_of_no_pages() {
    let quest: Selection = "quest:16,64".parse().unwrap();
    let keep = |keep| quest.clone().with_budget(keep);
    let forced = quest.clone().with_always(Always { first: 1, local: 0 });
    refused! {
        keep(Budget::TopK(2)).check() => "keep must be at least 3 pages for quest, got 2";
        keep(Budget::TopK(2)).on_pages(16, 1) => "keep must be at least 3 pages for quest, got 2";
        keep(Budget::Ratio(0.5)).check() => "keep must be a number of pages for quest, got Ratio(0.5)";
        keep(Budget::Ratio(0.5)).on_pages(16, 1) => "keep must be a number of pages for quest, got Ratio(0.5)";
        forced.check() => "forced.local must be at least 1, the query's own, for quest, got 0";
        forced.on_pages(16, 1) => "forced.local must be at least 1, the query's own, for quest, got 0";
        "topk:16,3".parse::<Selection>().unwrap().on_pages(16, 1) => "selection must be one that a pool of pages can choose by (moba, quest), got topk:16,3";
    }
    let choice = quest.on_pages(16, 4).unwrap();
    assert_eq!((choice.selected_pages(), choice.mean), (4, true));
    // The query's own page counts with its actual length. Forced pages count among the kept ones, unless they are more.
    for (first, local, listed, attended) in [
        (0, 1, 4, [0, 1, 64, 49, 52]),
        (1, 2, 4, [0, 1, 64, 49, 52]),
        (3, 2, 5, [0, 1, 64, 65, 68]),
        (usize::MAX, 1, usize::MAX, [0, 1, 64, 65, 100]),
    ] {
        let choice = quest.clone().with_always(Always { first, local });
        let choice = choice.on_pages(16, 4).unwrap();
        assert_eq!(choice.selected_pages(), listed);
        let got = [0, 1, 64, 65, 100].map(|keys| choice.attended(keys));
        assert_eq!(got, attended, "{first}, {local}");
    }
}

const TEXTS_OF_NONE: &str = "
    moba:512           | cannot read 'moba:512' as a selection: expected moba:BLOCK,K[,FULL_LAST_LAYERS], got 1 number
    moba:512,3,1,2     | cannot read 'moba:512,3,1,2' as a selection: expected moba:BLOCK,K[,FULL_LAST_LAYERS], got also '2'
    moba:512,-1        | cannot read 'moba:512,-1' as a selection: expected K to be a whole number, got '-1'
    moba:512,0         | k must be at least 1, got 0
    moba:48,3          | block must be 8, 16, 32, 64, 128 or a larger multiple of 128, got 48
    moba:192,3         | block must be 8, 16, 32, 64, 128 or a larger multiple of 128, got 192
    moba:64,3,first=-1 | cannot read 'moba:64,3,first=-1' as a selection: expected first to be a whole number, got '-1'
    moba:64,3,local=0  | forced.local must be at least 1, the query's own, for moba, got 0
    moba:64,ratio=0.5  | keep must be a number of blocks for moba, got Ratio(0.5)
    quest:16           | cannot read 'quest:16' as a selection: expected quest:PAGE,BUDGET[,FULL_FIRST_LAYERS], got 1 number
    quest:12,48        | page must be 8, 16, 32, 64 or 128, got 12
    quest:16,32        | BUDGET must be a multiple of 16, PAGE, and at least 3 times it, got 32
    quest:16,100       | BUDGET must be a multiple of 16, PAGE, and at least 3 times it, got 100
";

#[test]
fn texts_of_none() {
    for [text, message] in rows(TEXTS_OF_NONE) {
        refused! { text.parse::<Selection>() => message; }
    }
}

#[test]
fn options_of_none() {
    for device in &devices() {
        let plain = AttentionOptions::default;
        let call = |options: SelectedOptions| {
            let x = zeros([1, 2, 40, 8], device);
            attention_selected(x.clone(), x.clone(), x, &moba(), options)
        };
        refused! {
            call(plain().alibi([0.5, 0.5]).into()) => "options.alibi must be none where every query chooses for itself, got slopes";
            call(plain().dropout(Dropout::new(0.5, 1)).into()) => "options.dropout must be none where every query chooses for itself, got 0.5";
            call(plain().weights(WeightsMode::Store).into()) => "options.weights must be Recompute where every query chooses for itself, got Store";
            call(plain().softcap(0.0).into()) => "options.softcap must be positive and finite in f32, got 0";
            call(plain().scale(f64::NAN).into()) => "call.scale must be finite, got NaN";
            call(SelectedOptions::default().causal(false)) => "call.causal must be true for moba:16,3, got false";
        }
    }
}

#[test]
fn shapes() {
    for device in &devices() {
        let call = |q, k, v| {
            let [q, k, v] = [q, k, v].map(|shape| zeros(shape, device));
            attention_selected(q, k, v, &moba(), AttentionOptions::default())
        };
        refused! {
            call([1, 3, 40, 8], [1, 2, 40, 8], [1, 2, 40, 8]) => "k's kv_heads must be a divisor of the 3 heads of q, got 2";
            call([1, 2, 40, 8], [2, 2, 40, 8], [2, 2, 40, 8]) => "k's batch must be 1, q's, got 2";
            call([1, 2, 40, 8], [1, 2, 40, 4], [1, 2, 40, 8]) => "k's head_dim must be 8, q's, got 4";
            call([1, 2, 40, 8], [1, 2, 40, 8], [1, 2, 39, 8]) => "v's seq_kv must be 40, k's, got 39";
            call([0, 2, 40, 8], [0, 2, 40, 8], [0, 2, 40, 8]) => "q's batch must be at least 1, got 0";
            call([1, 2, 40, 0], [1, 2, 40, 0], [1, 2, 40, 8]) => "q's head_dim must be at least 1, got 0";
            call([1, 2, 0, 8], [1, 2, 40, 8], [1, 2, 40, 8]) => "seq_q must be between 1 and 1073741824, got 0";
            call([1, 2, 40, 8], [1, 2, 0, 8], [1, 2, 0, 8]) => "seq_kv must be between 1 and 1073741824, got 0";
        }
    }
}

#[test]
fn selections_of_none() {
    for device in devices() {
        let x = zeros([1, 2, 40, 8], &device);
        let call = EstimateInputs::new(x.clone(), x.clone());
        let run = |selection: &Selection| {
            let options = AttentionOptions::default();
            attention_selected(x.clone(), x.clone(), x.clone(), selection, options).map(|_| ())
        };
        refused! {
            run(&moba().with_budget(Budget::TopK(0))) => "k must be at least 1, got 0";
            run(&moba().with_budget(Budget::MinP(0.5))) => "keep must be a number of blocks for moba, got MinP(0.5)";
            run(&moba().with_always(Always { first: 1, local: 0 })) => "forced.local must be at least 1, the query's own, for moba, got 0";
            moba().choose(&call) => "query_rows must be as many queries as keys of a block (attention_selected also takes 1), got 1";
        }
        let squares: Selection = "topk:16,3".parse().unwrap();
        refused! { squares.query_lists(&call) => "query_rows must be 1, got 16"; }
        // Sharing is no error, even if heads have nothing to share.
        run(&moba().with_gqa_reduction(GqaReduction::Sum)).unwrap();
    }
}

#[test]
fn rows_of_none() {
    for device in devices() {
        let gather = |index: [usize; 3], users: [usize; 4]| {
            let index = Tensor::<3, Int>::zeros(index, &device);
            let users = Tensor::<4, Int>::zeros(users, &device);
            gather_rows(zeros([1, 2, 5, 3], &device), index, users)
        };
        refused! {
            gather([1, 1, 4], [1, 2, 5, 1]) => "index's heads must be [1, 2], x's, got [1, 1]";
            gather([1, 2, 4], [1, 2, 4, 1]) => "users' rows must be [1, 2, 5], x's, got [1, 2, 4]";
            gather([1, 2, 0], [1, 2, 5, 1]) => "index's places must be at least 1, got 0";
            gather([1, 2, 4], [1, 2, 5, 0]) => "users' width must be at least 1, got 0";
        }
    }
}
