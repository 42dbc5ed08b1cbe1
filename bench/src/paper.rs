//! Comparisons with a model: the workload of 4.1, old knowledge, pools of it, and new knowledge by every variant.

use anyhow::{Context, Result, ensure};
use laser_coordinator::prompt::{PromptConfig, PromptRenderer};
use laser_decode::{Drafter, PolicyError, Verification};
use laser_engine::{DTypeOption, Engine};
use laser_model::{ModelFiles, Tokenizer};
use laser_night::{Progress, open_local_model};
use laser_schema::{Digest, Entity, EntityTable, Kind};
use laser_store::previous::PreviousText;
use laser_terminal::Display;
use laser_worker::budget::Budget;
use laser_worker::cost::StepCost;
use laser_worker::generate::{GenerateOptions, Generator};
use serde_json::json;

use super::history::{Draw, Workload, table};
use super::old::OldKnowledge;
use super::pools::{PoolScheme, Pools};
use super::report::{KindReport, Report};
use super::run::{Comparison, Subject};
use super::sources::{CompareArgs, DraftModels};
use super::variants::{self, Variant};
use super::{LoadArgs, SetupArgs, write_file};

/// Tokens of a step: several whole prompts.
const STEP_TOKENS: usize = 4096;

/// The paper's comparison of pools and verification (4.2, 4.3).
pub(super) async fn paper(setup: &SetupArgs) -> Result<Report> {
    let variants = |kind| variants::paper(setup, kind);
    compare("paper", setup, &variants, &[setup.batch]).await
}

/// The paper's comparison of acceptance rules (3.4).
pub(super) async fn ablation(setup: &SetupArgs) -> Result<Report> {
    let variants = |_| variants::ablation(setup);
    compare("ablation", setup, &variants, &[setup.batch]).await
}

/// Sizes of pools and trees.
pub(super) async fn sweep(setup: &SetupArgs, sizes: &[usize], trees: &[usize]) -> Result<Report> {
    let variants = |_| variants::sweep(setup, sizes, trees);
    compare("sweep", setup, &variants, &[setup.batch]).await
}

/// Ways of speculating by batch size.
pub(super) async fn batch(setup: &SetupArgs, batches: &[u16], trees: &[usize]) -> Result<Report> {
    compare("batch", setup, &|_| variants::batch(setup, trees), batches).await
}

/// Sources of drafts and rules by batch size.
pub(super) async fn sources(args: &CompareArgs) -> Result<Report> {
    let CompareArgs { setup, batches, .. } = args;
    let model = open_local_model(&setup.model).await?;
    let draft_models = DraftModels::open(args, &model).await?;
    let base = GenerateOptions { sampling: args.sampling()?, ..options(setup, &model) };
    let variants = args.chosen(args.variants(&draft_models.have_heads())?)?;
    let of_kind = |_| Ok(variants.clone());
    run("compare", setup, &of_kind, batches, (model, base, draft_models, args.runners_up)).await
}

/// The variants of a kind; the first is plain decoding.
type Variants<'a> = &'a dyn Fn(Kind) -> Result<Vec<Variant>, PolicyError>;

/// One kind's entities with their prompts, and what is to be compared.
struct Prompted {
    kind: Kind,
    variants: Vec<Variant>,
    old: Vec<(Entity, Vec<u32>)>,
    new: Vec<(Entity, Vec<u32>)>,
}

async fn compare(command: &'static str, setup: &SetupArgs, variants: Variants<'_>, batches: &[u16]) -> Result<Report> {
    let model = open_local_model(&setup.model).await?;
    let base = options(setup, &model);
    run(command, setup, variants, batches, (model, base, DraftModels::NONE, 0)).await
}

/// Runs the comparison with what all variants share.
async fn run(
    command: &'static str,
    setup: &SetupArgs,
    variants: Variants<'_>,
    batches: &[u16],
    (model, base, draft_models, runners_up): (ModelFiles, GenerateOptions, DraftModels, usize),
) -> Result<Report> {
    let mut display = Display::new();
    display.stage("reading");
    let tables = tables(setup);
    let workload = read(setup, &tables, &model, variants).await?;
    let mut engine = load_engine(setup, &model)?;
    let mut report = Report::new(command, setup, engine.info(), &model)?;
    let budgets = budgets(engine.as_mut(), &workload, batches)?;
    let mut generator = Generator::new(engine, model.tokenizer.clone(), base.clone());

    display.stage("old knowledge");
    let texts = match of_old_model(setup) {
        None => {
            let mut knowledge = old_knowledge(setup, &model, &base, runners_up)?;
            old_texts(&mut knowledge, &workload, &base, &mut generator, &mut display)?
        }
        Some(setup) => {
            let (old, mut generator) = old_writer(&setup, &model).await?;
            let base = GenerateOptions { sampling: base.sampling, ..options(&setup, &old) };
            let mut knowledge = old_knowledge(&setup, &old, &base, runners_up)?;
            old_texts(&mut knowledge, &workload, &base, &mut generator, &mut display)?
        }
    };
    display.finish_with(&format!("{} texts", texts.len()));

    display.stage("building pools");
    let schemes = schemes(&workload);
    let pools = Pools::build(setup, schemes, &tables, &texts, &model, &mut display).await?;
    report.pools = pools.summary();
    display.finish_with(&format!("{} pools", report.pools.len()));

    for Prompted { kind, variants, new, .. } in workload {
        let subjects = subjects(new, &pools, &texts, &model.tokenizer)?;
        write_prompts(setup, kind, &subjects)?;
        for (&batch, budget) in batches.iter().zip(&budgets) {
            display.stage(&format!("new {kind} knowledge, batch {batch}"));
            let base = GenerateOptions { batch: usize::from(batch), budget: budget.clone(), ..base.clone() };
            let comparison = Comparison {
                base: &base,
                variants: &variants,
                draft_models: &draft_models,
                subjects: &subjects,
                rounds: setup.rounds,
            };
            let measured = comparison.interleave(&mut generator, &mut display)?;
            let texts = subjects.len() * usize::from(setup.rounds);
            display.finish_with(&format!("{texts} texts, {} ways", variants.len()));
            let found =
                KindReport::new((kind, batch), &variants, &subjects, &measured, budget.as_ref().map(Budget::cost));
            report.kinds.push(found);
        }
    }
    Ok(report)
}

/// The setup with the model that writes the old texts in place of the other.
fn of_old_model(setup: &SetupArgs) -> Option<SetupArgs> {
    let load = LoadArgs { dtype: DTypeOption::F32, isq: None, ..setup.load.clone() };
    setup.old_model.clone().map(|model| SetupArgs { model, load, ..setup.clone() })
}

async fn old_writer(setup: &SetupArgs, model: &ModelFiles) -> Result<(ModelFiles, Generator)> {
    let old = open_local_model(&setup.model).await?;
    ensure!(
        old.tokenizer.fingerprint() == model.tokenizer.fingerprint(),
        "--old-model {}: its tokenizer is not that of --model, whose tokens the prompts are",
        setup.model
    );
    let generator = Generator::new(load_engine(setup, &old)?, old.tokenizer.clone(), options(setup, &old));
    Ok((old, generator))
}

/// The texts that pools are built from.
fn old_texts(
    knowledge: &mut OldKnowledge,
    workload: &[Prompted],
    base: &GenerateOptions,
    generator: &mut Generator,
    display: &mut Display,
) -> Result<Vec<PreviousText>> {
    let mut texts = Vec::new();
    for prompted in workload {
        texts.extend(knowledge.texts(generator, base, &prompted.old, display)?);
    }
    Ok(texts)
}

/// For every batch size what forwards cost, if any variant wants to know.
fn budgets(engine: &mut dyn Engine, workload: &[Prompted], batches: &[u16]) -> Result<Vec<Option<Budget>>> {
    let adaptive = workload.iter().flat_map(|of| &of.variants).filter(|v| v.adaptive);
    let Some(nodes) = adaptive.map(|variant| variant.nodes).max() else {
        return Ok(vec![None; batches.len()]);
    };
    let budget = |batch: &u16| -> Result<Option<Budget>> {
        let batch = usize::from(*batch);
        let cost = StepCost::measure(engine, batch, batch * (nodes + 1))?;
        Ok(Some(Budget::new(cost)))
    };
    batches.iter().map(budget).collect()
}

fn tables(setup: &SetupArgs) -> Vec<EntityTable> {
    let users = setup.users_table.as_ref().map(|path| table(path, Kind::User));
    let items = setup.items_table.as_ref().map(|path| table(path, Kind::Item));
    users.into_iter().chain(items).collect()
}

async fn read(
    setup: &SetupArgs,
    tables: &[EntityTable],
    model: &ModelFiles,
    variants: Variants<'_>,
) -> Result<Vec<Prompted>> {
    let positions = model.max_positions.unwrap_or(usize::MAX);
    let renderer = PromptRenderer::new(
        &PromptConfig {
            user: setup.user_template.clone(),
            item: setup.item_template.clone(),
            chat: setup.chat,
            max_tokens: Some(setup.prompt_tokens.unwrap_or(1024.min(positions / 2))),
            ..PromptConfig::default()
        },
        model,
        setup.max_new_tokens,
    )?;
    let prompt = |entity: Entity| -> Result<(Entity, Vec<u32>)> {
        let tokens = renderer.render(&entity)?.tokens;
        Ok((entity, tokens))
    };
    let draw = Draw { old: setup.old_texts, new: setup.new_texts, min_history: setup.min_history, seed: setup.seed };
    let mut workload = Vec::new();
    for table in tables {
        let kind = table.kind.unwrap_or(Kind::User);
        let Workload { old, new } = Workload::read(table, kind, draw).await?;
        workload.push(Prompted {
            kind,
            variants: variants(kind)?,
            old: old.into_iter().map(prompt).collect::<Result<_>>()?,
            new: new.into_iter().map(prompt).collect::<Result<_>>()?,
        });
    }
    Ok(workload)
}

/// The prompts of the new texts, by kind.
pub(super) async fn prompts(setup: &SetupArgs, model: &ModelFiles) -> Result<Vec<(Kind, Vec<Vec<u32>>)>> {
    let workload = read(setup, &tables(setup), model, &|_| Ok(Vec::new())).await?;
    let prompts = |of: Prompted| (of.kind, of.new.into_iter().map(|(_, prompt)| prompt).collect());
    Ok(workload.into_iter().map(prompts).collect())
}

pub(super) fn load_engine(setup: &SetupArgs, model: &ModelFiles) -> Result<Box<dyn Engine>> {
    laser_engine::load(&setup.load.options(model.path().to_owned())).with_context(|| format!("--model {}", setup.model))
}

/// `prompts-KIND.jsonl`: the tokens of every prompt, so that other engines can be given the same ones.
fn write_prompts(setup: &SetupArgs, kind: Kind, subjects: &[Subject]) -> Result<()> {
    let line = |subject: &Subject| format!("{}\n", json!({"id": subject.id, "prompt": subject.prompt}));
    let path = setup.output.join(format!("prompts-{kind}.jsonl"));
    write_file(&path, subjects.iter().map(line).collect::<String>())
}

/// What all variants share; they set the rest.
pub(super) fn options(setup: &SetupArgs, model: &ModelFiles) -> GenerateOptions {
    GenerateOptions {
        budget: None,
        drafter: Drafter::None,
        alignment: 0,
        nodes: 0,
        verification: Verification::Strict,
        sampling: None,
        batch: usize::from(setup.batch),
        step_tokens: STEP_TOKENS,
        max_new_tokens: setup.max_new_tokens,
        end_of_text: model.end_of_text.clone(),
        stop: Vec::new(),
        shared_prefixes: true,
    }
}

/// The old texts of all that they depend on beside their prompt.
fn old_knowledge(
    setup: &SetupArgs,
    model: &ModelFiles,
    base: &GenerateOptions,
    runners_up: usize,
) -> Result<OldKnowledge> {
    let tokenizer = Digest::from_bytes(model.tokenizer.fingerprint());
    let spec = Digest::of_json(&(
        model.digest()?,
        tokenizer,
        setup.load.dtype,
        &setup.load.isq,
        setup.max_new_tokens,
        &model.end_of_text,
    ));
    let spec = match base.sampling.map(|sampling| sampling.temperature()) {
        None if runners_up == 0 => spec,
        temperature => Digest::of_json(&(spec, temperature, runners_up)),
    };
    OldKnowledge::open(&setup.output, spec, runners_up)
}

/// Each scheme that a variant drafts from, once.
fn schemes(workload: &[Prompted]) -> Vec<PoolScheme> {
    let mut schemes = Vec::new();
    for scheme in workload.iter().flat_map(|of| &of.variants).filter_map(|variant| variant.pools) {
        if !schemes.contains(&scheme) {
            schemes.push(scheme);
        }
    }
    schemes
}

fn subjects(
    entities: Vec<(Entity, Vec<u32>)>,
    pools: &Pools,
    old: &[PreviousText],
    tokenizer: &Tokenizer,
) -> Result<Vec<Subject>> {
    let subject = |(entity, prompt): (Entity, Vec<u32>)| -> Result<Subject> {
        let own = old.iter().find(|text| text.kind == entity.kind && text.id == entity.id);
        let own = own.map(|text| tokenizer.encode(&text.text, false)).transpose()?;
        let pools = pools.of(&entity);
        Ok(Subject { id: entity.id, key: 0, prompt, own: own.unwrap_or_default(), pools })
    };
    let keyed = |(subject, key): (Result<Subject>, u64)| Ok(Subject { key, ..subject? });
    entities.into_iter().map(subject).zip(0..).map(keyed).collect()
}
