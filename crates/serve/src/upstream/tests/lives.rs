//! Random lives of the calls to one server: they are opened, read, given up and cut at any moment. After each step the server is ahead
//! of each reader by the whole window, or has sent all. In the end no window is missing.

use super::*;

struct Call {
    answer: Answer,
    size: usize,
    read: usize,
    sent: Arc<AtomicUsize>,
    /// The connection was cut, so the rest may be missing.
    is_cut: bool,
}

impl Call {
    async fn open(server: &Arc<Server>, upstream: &Upstream, size: usize, piece: usize) -> Self {
        let opened = timeout(PATIENCE / 2, server.ask(upstream, &format!("/{size}/{piece}"))).await;
        let (_, answer) = opened.expect("it waits").expect("a head");
        let sent = server.sent.lock().last().expect("the call").clone();
        Call { answer, size, read: 0, sent, is_cut: false }
    }

    /// Takes the next piece, if one has come. Returns whether it was the end.
    async fn read_on(&mut self) -> bool {
        match poll_fn(|context| Poll::Ready(self.answer.poll_frame(context))).await {
            Poll::Pending => false,
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => {
                    self.read += data.len();
                    false
                }
                Err(_) => {
                    assert_eq!(self.read, self.size);
                    true
                }
            },
            Poll::Ready(Some(Err(error))) => {
                assert!(self.is_cut, "{error}");
                true
            }
            Poll::Ready(None) => panic!("no trailers behind {} bytes", self.read),
        }
    }

    /// To be called when nothing moves.
    fn keeps_its_window(&self) {
        let window = if self.answer._wide.is_some() { WIDE } else { NARROW } as usize;
        let (sent, may) = (self.sent.load(Ordering::Relaxed), self.size.min(self.read + window));
        assert!(
            sent == may || self.is_cut && sent < may,
            "{sent} bytes sent, {} read of {}",
            self.read,
            self.size
        );
    }
}

/// The time of these tests goes on only when no task can do anything.
async fn until_quiet() {
    sleep(Duration::from_millis(1)).await;
}

async fn life(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let most = random.choice([None, None, Some(1), Some(5)]).expect("one of them");
    let server = Server::new(|builder| match most {
        Some(most) => builder.max_concurrent_streams(most),
        None => builder,
    });
    let wide = random.usize(..=3);
    let windows = WideWindows::of(wide * WIDE as usize);
    let upstream = Upstream::new(windows.clone(), OFTEN);
    let mut open: Vec<Call> = Vec::new();
    for _ in 0..random.usize(20..200) {
        let chosen = (!open.is_empty()).then(|| random.usize(..open.len()));
        match (random.u8(..100), chosen) {
            (0..30, _) | (_, None) => {
                let window = random.choice([NARROW, WIDE]).expect("one of them");
                let size = random.usize(..4 * window as usize);
                let largest = random.usize(1..100_000);
                let piece = random.usize(1..=largest);
                open.push(Call::open(&server, &upstream, size, piece).await);
            }
            (30..60, Some(chosen)) => {
                if open[chosen].read_on().await {
                    open.swap_remove(chosen);
                }
            }
            (60..75, Some(chosen)) => {
                let mut call = open.swap_remove(chosen);
                let whole = async {
                    while !call.read_on().await {
                        until_quiet().await;
                    }
                };
                timeout(PATIENCE, whole).await.expect("it stops");
            }
            (75..98, Some(chosen)) => drop(open.swap_remove(chosen)),
            (_, Some(_)) => {
                server.kill();
                open.iter_mut().for_each(|call| call.is_cut = true);
            }
        }
        until_quiet().await;
        open.iter().for_each(Call::keeps_its_window);
    }
    drop(open);
    sleep(2 * GRACE).await;
    assert_eq!((streams(&upstream), windows.0.available_permits()), (0, wide));
    // As many stalled streams as a connection may have.
    let mut all = Vec::new();
    for _ in 0..STREAMS + wide {
        all.push(Call::open(&server, &upstream, 2 * WIDE as usize, WIDE as usize).await);
    }
    until_quiet().await;
    all.iter().for_each(Call::keeps_its_window);
}

#[tokio::test(start_paused = true)]
async fn in_any_life_each_window_is_kept_and_given_back() {
    let seed = |name| std::env::var(name).ok().map(|seed| seed.parse::<u64>().expect("a number"));
    let seeds = match seed("DELTAPATH_RELAY_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..seed("DELTAPATH_RELAY_LIVES").unwrap_or(50),
    };
    for seed in seeds {
        let lived = tokio::spawn(life(seed)).await;
        assert!(lived.is_ok(), "DELTAPATH_RELAY_SEED={seed} plays this life again");
    }
}
