//! Content-based selection of keys.

use burn_sparse_select::{Always, Budget, GqaReduction, Selection};

use burn_blocksparse_tests::prelude::{refused, rows};

burn_blocksparse_tests::tests!(selection);

const TEXTS: &str = "
    topk:64,16                                          | topk:64,16
    topk:64,ratio=0.25,3,0,share=mean                   | topk:64,ratio=0.25,3,0,share=mean
    topk:64,p=0.9,min=2,max=8                           | topk:64,p=0.9,min=2,max=8
    xattention:128,16,0.9                               | xattention:128,16,0.9
    xattention:128,16,p=0.9,share=no                    | xattention:128,16,0.9
    xattention:128,16,0.9,min=3                         | xattention:128,16,0.9,min=3
    xattention:64,8,k=12,share=sum                      | xattention:64,8,k=12,share=sum
    xattention:64,8,above=0.01,local=2,first=2          | xattention:64,8,above=0.01,first=2
    xattention:64,8,above=0.01,local=1                  | xattention:64,8,above=0.01,local=1
    xattention:64,8,0.8,local=0,first=0                 | xattention:64,8,0.8,first=0,local=0
    sparge:64,0.98,0.6                                  | sparge:64,0.98,0.6
    sparge:64,ratio=0.5,-0.1,smooth=0                   | sparge:64,ratio=0.5,-0.1,smooth=0
    sparge:64,0.98,0.6,smooth=1,first=1,local=2         | sparge:64,0.98,0.6
    sparge:64,0.98,0.6,first=0,local=1                  | sparge:64,0.98,0.6,first=0,local=1
    flexprefill:128,0.9                                 | flexprefill:128,0.9
    flexprefill:128,0.95,0.1                            | flexprefill:128,0.95
    flexprefill:128,0.95,0.1,0                          | flexprefill:128,0.95
    flexprefill:128,0.95,0.1,1024                       | flexprefill:128,0.95,0.1,1024
    flexprefill:128,0.95,0.2,share=max                  | flexprefill:128,0.95,0.2,share=max
    flexprefill:64,0.9,above=0.5,local=2                | flexprefill:64,0.9,above=0.5,local=2
    minference:64,1000,6096                             | minference:64,1000,6096
    minference:64,100,200,64,sinks=30                   | minference:64,100,200
    minference:64,100,200,32,window=8,sinks=4,share=max | minference:64,100,200,32,sinks=4,window=8,share=max
";

/// A text parses, and is printed as the shortest text of the same selection.
#[test]
fn texts_round_trip() {
    let spaced = [[" topk : 64 , k=16 ", "topk:64,16"]];
    for [text, written] in rows(TEXTS).into_iter().chain(spaced) {
        let selection: Selection = text.parse().unwrap();
        assert_eq!(selection.to_string(), written);
        let again: Selection = written.parse().unwrap();
        assert_eq!(again, selection);
        assert_eq!(again.rule(), selection.rule());
        assert_eq!(again.gqa_reduction(), selection.gqa_reduction());
        let json = serde_json::to_string(&selection).unwrap();
        assert_eq!(json, format!("\"{written}\""));
        assert_eq!(serde_json::from_str::<Selection>(&json).unwrap(), selection);
    }
}

/// Changes after parsing are printed, too.
#[test]
fn changes_are_written() {
    for text in [
        "xattention:64,8,0.9",
        "sparge:64,0.9,0.5",
        "flexprefill:64,0.9",
        "minference:64,10,10",
    ] {
        let changed = text.parse::<Selection>().unwrap();
        let changed = changed
            .with_budget(Budget::Ratio(0.5))
            .with_always(Always { first: 3, local: 4 })
            .with_gqa_reduction(GqaReduction::Mean);
        let again: Selection = changed.to_string().parse().unwrap();
        assert_eq!(again.rule(), changed.rule(), "{changed}");
        assert_eq!(again.gqa_reduction(), GqaReduction::Mean, "{changed}");
    }
}

const ERRORS: &str = "
    xattention:64                 | cannot read 'xattention:64' as a selection: expected xattention:BLOCK,STRIDE,KEEP, got 1 number
    xattention:64,8               | cannot read 'xattention:64,8' as a selection: expected xattention:BLOCK,STRIDE,KEEP, got 2 numbers
    xattention:64,8,x             | cannot read 'xattention:64,8,x' as a selection: expected KEEP to be a number, got 'x'
    xattention:64,8,0.9,1         | cannot read 'xattention:64,8,0.9,1' as a selection: expected xattention:BLOCK,STRIDE,KEEP, got also '1'
    xattention:64,8,0.9,k=3       | cannot read 'xattention:64,8,0.9,k=3' as a selection: expected xattention:BLOCK,STRIDE,KEEP, got also '0.9'
    xattention:64,8,p=0.9,k=3     | cannot read 'xattention:64,8,p=0.9,k=3' as a selection: expected one rule, got also p=0.9
    xattention:64,8,0.9,share=all | cannot read 'xattention:64,8,0.9,share=all' as a selection: expected share to be no, sum, mean or max, got 'all'
    xattention:64,8,0.9,last=2    | cannot read 'xattention:64,8,0.9,last=2' as a selection: expected xattention:BLOCK,STRIDE,KEEP, got 'last='
    xattention:64,8,0.9,first=x   | cannot read 'xattention:64,8,0.9,first=x' as a selection: expected first to be a whole number, got 'x'
    xattention:48,8,0.9           | block must be 8, 16, 32, 64 or 128, got 48
    xattention:64,12,0.9          | stride must be a divisor of the block, 64, got 12
    xattention:64,0,0.9           | stride must be a divisor of the block, 64, got 0
    xattention:64,8,1.5           | p must be above 0 and at most 1, got 1.5
    sparge:64,0.9                 | cannot read 'sparge:64,0.9' as a selection: expected sparge:BLOCK,KEEP,SIMILARITY[,smooth=0], got 2 numbers
    sparge:64,0.9,0.5,smooth=2    | cannot read 'sparge:64,0.9,0.5,smooth=2' as a selection: expected smooth to be 0 or 1, got '2'
    sparge:64,0.9,2               | similarity must be from -1 to 1, got 2
    sparge:64,0.9,NaN             | similarity must be from -1 to 1, got NaN
    sparge:9,0.9,0.5              | block must be 8, 16, 32, 64 or 128, got 9
    flexprefill:64                | cannot read 'flexprefill:64' as a selection: expected flexprefill:BLOCK,GAMMA[,THRESHOLD[,MIN_BUDGET]], got 1 number
    flexprefill:64,0              | gamma must be above 0 and at most 1, got 0
    flexprefill:64,0.9,-1         | threshold must be at least 0, got -1
    flexprefill:65,0.9            | block must be 8, 16, 32, 64 or 128, got 65
    flexprefill:64,0.9,0.1,5,6    | cannot read 'flexprefill:64,0.9,0.1,5,6' as a selection: expected flexprefill:BLOCK,GAMMA[,THRESHOLD[,MIN_BUDGET]], got also '6'
    minference:64,9               | cannot read 'minference:64,9' as a selection: expected minference:BLOCK,COLUMNS,SLASHES[,QUERIES][,sinks=30][,window=100], got 2 numbers
    minference:64,9,1.5           | cannot read 'minference:64,9,1.5' as a selection: expected SLASHES to be a whole number, got '1.5'
    minference:64,9,9,0           | queries must be at least 1, got 0
    minference:64,9,9,window=0    | window must be at least 1, got 0
    minference:63,9,9             | block must be 8, 16, 32, 64 or 128, got 63
";

/// Invalid text, and numbers out of range.
#[test]
fn errors() {
    for [text, message] in rows(ERRORS) {
        refused! { text.parse::<Selection>() => message; }
    }
}

/// The error for an unknown method lists the known ones.
#[test]
fn unknown_methods_are_told_of_the_known() {
    let error = "nothing:3".parse::<Selection>().unwrap_err().to_string();
    for notation in Selection::NOTATION {
        assert!(error.contains(notation), "{error}");
    }
    assert_eq!(Selection::NOTATION.len(), 7);
    assert!(error.ends_with("got 'nothing'"), "{error}");
}
